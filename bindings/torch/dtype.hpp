// torch's dtypes as the library's.
#pragma once

#include "status.hpp"

#include <c10/core/ScalarType.h>

namespace penstock {

inline pst_dtype dtype_of(at::ScalarType type) {
    switch (type) {
    case at::kFloat:
        return PST_FLOAT32;
    case at::kDouble:
        return PST_FLOAT64;
    case at::kHalf:
        return PST_FLOAT16;
    case at::kBFloat16:
        return PST_BFLOAT16;
    case at::kChar:
        return PST_INT8;
    case at::kByte:
        return PST_UINT8;
    case at::kShort:
        return PST_INT16;
    case at::kInt:
        return PST_INT32;
    case at::kLong:
        return PST_INT64;
    case at::kBool:
        return PST_BOOL;
    case at::kFloat8_e4m3fn:
        return PST_FLOAT8_E4M3;
    case at::kFloat8_e5m2:
        return PST_FLOAT8_E5M2;
    default:
        throw StatusError{PST_EUNSUPPORTED,
                          std::string("dtype ") + c10::toString(type) + " cannot be sharded"};
    }
}

} // namespace penstock
