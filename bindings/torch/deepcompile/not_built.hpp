#pragma once
#include "status.hpp"
namespace penstock::dc {
[[noreturn]] inline void not_built(const char *what) {
    throw StatusError{PST_EUNSUPPORTED, std::string(what) + " is not built yet"};
}
} // namespace penstock::dc
