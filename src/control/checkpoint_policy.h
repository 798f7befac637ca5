// CheckpointPolicy: at which positions the recurrent state of a sequence is saved. Pure arithmetic on positions.
//
// A hit of a recurrent model can end only where a checkpoint lies, and a checkpoint costs as many pages as a state, so
// they are kept where a later request is likely to branch off or go on:
//   end of prompt  the last boundary that leaves a token to compute: the same prompt again (n > 1), and its next turn;
//   interval       every so many tokens of prompt and output: edits in the middle of a long context;
//   junction       where the prompt leaves cached blocks of another one: a system prompt shared by many requests is
//                  saved by the second that has it, whatever follows it;
//   rolling        every so many tokens of output, each replacing the sequence's one before it: the next turn of a
//                  conversation goes on close to where this one ended, whenever that was.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace perigee {

struct CheckpointPolicy {
  static constexpr int32_t kNone = std::numeric_limits<int32_t>::max();
  enum class Keep : uint8_t { kNo, kRolling, kLong };

  int32_t granularity_tokens = 64;  // of hits; every kept position is a multiple of it
  int32_t interval_tokens = 0;      // multiples of the granularity; 0: none
  int32_t rolling_tokens = 0;

  // Where an input of which `matched` tokens are cached blocks leaves them, if the hit falls short of that by more than
  // a conversation's next turn does anyway; else 0.
  int32_t junction(int32_t hit, int32_t matched) const { return matched - hit > rolling_tokens ? matched : 0; }

  // The first kept position after `from` in an input of num_tokens tokens; kNone where none follows.
  int32_t next_in_input(int32_t from, int32_t num_tokens, int32_t junction) const {
    int32_t next = kNone;
    const int32_t end_of_prompt = (num_tokens - 1) / granularity_tokens * granularity_tokens;
    const int32_t interval_end = interval_tokens > 0 ? (from / interval_tokens + 1) * interval_tokens : 0;
    for (const int32_t position : {end_of_prompt, junction, interval_end})
      if (position > from && position <= num_tokens) next = std::min(next, position);
    return next;
  }

  // For a position among the outputs.
  Keep in_decode(int32_t position) const {
    if (interval_tokens > 0 && position % interval_tokens == 0) return Keep::kLong;
    return rolling_tokens > 0 && position % rolling_tokens == 0 ? Keep::kRolling : Keep::kNo;
  }
};

}  // namespace perigee
