// One request on a serving loop, from the end of its head to the end of its answer: the check of the head, the body
// under its budget and its deadline, the handler, the answer.
#pragma once

#include "server/http_connection.h"
#include "server/http_head.h"

namespace perigee {

// Null: the connection has ended. Otherwise it goes back to where heads are read. Throws
// std::bad_alloc with the connection closed.
Task<std::shared_ptr<HttpPeer>> serve_request(std::shared_ptr<HttpLoop> loop, std::shared_ptr<HttpPeer> peer,
                                              HttpHead head);

}  // namespace perigee
