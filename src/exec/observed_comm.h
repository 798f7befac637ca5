// A rank's collectives with an observer beside them, on the host. Where it wants waits, each begins with a barrier: so
// what ranks wait for each other is told apart from what a collective takes.
#pragma once

#include <memory>

#include "comm/comm.h"

namespace perigee {

class OpObserver;

// Both outlive it.
std::unique_ptr<Comm> observe_comm(Comm& inner, OpObserver& observer);

}  // namespace perigee
