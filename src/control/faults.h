// Planted bugs, for the simulator to catch (tests/sim). The engine's library compiles every hook to `false`; only the
// simulator's own build of these sources (PERIGEE_FAULTS) can switch one on, so that a hook costs the engine nothing
// and no flag travels through the layers.
#pragma once

namespace perigee {

enum class Fault {
  kNone = 0,
  kFreeUnderFlight = 1,     // an ended sequence's pages and slot are free while plans in flight still touch them
  kPublishUnconfirmed = 2,  // blocks are published when they are planned, not when their result is in
  kHashDecides = 3,         // a hit does not compare token ids
  kSaltIgnored = 4,         // sequences share prefixes across salts
  kPageOffByOne = 5,        // the page of a block's first decoded token is missing
  kDoubleDelivery = 6,      // ids are delivered twice when the token completes a block
  kLostFinish = 7,          // a sequence cancelled while it waits ends without an update
  kFullPromptHit = 8,       // a hit may cover the whole prompt
  kStaleLength = 9,         // a preempted sequence keeps the length that it had
  kLateIdsDelivered = 10,   // ids of a row that was in flight when its sequence ended are delivered

  // Recurrent state.
  kHitMaxOverGroups = 11,         // a hit is as long as the cached blocks, wherever the last checkpoint lies
  kCheckpointLate = 12,           // a checkpoint holds the state one token past its boundary
  kCheckpointFreeUnderCopy = 13,  // the pages of a checkpoint may be reused while a plan in flight copies them
  kCheckpointUnconfirmed = 14,    // a checkpoint and its blocks may be hit before the result of their step is in
  kCheckpointOutlivesBlock = 15,  // a block that is evicted leaves its checkpoint behind, at whatever comes there
  kPartialEviction = 16,          // a checkpoint of which one page was evicted is still hit
  kStateFreeUnderFlight = 17,     // an ended sequence's state pages are free while plans in flight still touch them
  kStateNotCleared = 18,          // the worker does not zero the state of a sequence that starts without a hit
  kCommitUnconfirmed = 19,        // the worker commits the token of a decode row that is still in its ring
  kRingDropped = 20,              // the worker forgets its ring where a chunk or row should replay it
  kCheckpointsAtFirst = 21,       // the second checkpoint of a row is written at the position of its first
  kCheckpointsSwapped = 22,       // a row's last two checkpoints are listed in the wrong order

  // Admission.
  kStaleMatch = 23,      // the waiting head's match keeps blocks that were evicted meanwhile
  kQueueOvertaken = 24,  // a head that does not fit is stepped over

  // Verify rows, and several ranks.
  kAllDraftsConfirmed = 25,  // a verify row confirms all its tokens, however many were accepted
  kPositionRelied = 26,      // a row after a verify row says that all drafts before it will be accepted
  kCheckpointAssumed = 27,   // a checkpoint is kept whether or not its row reached the boundary
  kNoPagesForDrafts = 28,    // a verify row has pages for its first token only
  kRingNotCut = 29,          // the worker replays rejected tokens from its ring
  kRankForgotten = 30,       // a result is joined before the last rank has run its step
  kLastDraftLost = 31,       // of a row that accepts all its drafts the last id is not delivered

  // Masks.
  kMaskOfOtherPlace = 32,       // each place of a verify row has the mask of the place before
  kMaskOfStepBefore = 33,       // a row's masks are made before the result of the step before is in
  kConstraintUnconfirmed = 34,  // a constraint moves by a draft before its row has accepted it
  kMaskForgotten = 35,          // the last masked row of a step has no masks
};
inline constexpr int kNumFaults = 35;

#ifdef PERIGEE_FAULTS
inline Fault g_planted_fault = Fault::kNone;
inline bool planted(Fault fault) {
  return g_planted_fault == fault;
}
#else
constexpr bool planted(Fault) {
  return false;
}
#endif

}  // namespace perigee
