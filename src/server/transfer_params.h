// kv_transfer_params: what a router passes between the server that computes a prompt and the one that computes its
// reply, with vLLM's names.
//
//   to the prefill server    {"do_remote_decode": true}: hold the prompt's cache for another server; with
//                            "announce_early": true the reply is a stream whose first event has these parameters, as
//                            soon as the prompt's computation begins (this router's word, which other servers ignore)
//   its reply                {"do_remote_prefill": true, "remote_host", "remote_port", "remote_engine_id",
//                             "remote_request_id", "remote_num_tokens", "remote_tag"}
//   to the decode server     the same
#pragma once

#include <optional>

#include "engine/messages.h"
#include "server/fields.h"

namespace perigee {

struct TransferParams {
  LeaseWish lease = LeaseWish::kNone;  // do_remote_decode, announce_early
  std::optional<RemotePrefix> remote;  // do_remote_prefill; none where the other server holds nothing
  bool leases() const { return lease != LeaseWish::kNone; }
};

// The request's member `params`; faults land in its `fields`. Members with other names, of other engines' transfers,
// mean nothing.
TransferParams read_transfer_params(const Json& params, Fields& fields);

// What another server holds for the request with this body, if that can be read, whatever else is wrong with it.
std::optional<RemotePrefix> remote_prefix_of(const Json& body);

// Of a reply to do_remote_decode. Without a lease it says that there is nothing to fetch: of prompts up to a block.
Json transfer_params_json(const std::optional<RemotePrefix>& lease);

}  // namespace perigee
