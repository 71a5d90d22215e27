#pragma once

namespace parplan {

// A port of 127.0.0.1 that nobody listened at a moment ago. RunError where there is none.
int free_loopback_port();

}  // namespace parplan
