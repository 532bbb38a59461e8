#include <penstock/device.h>

static const struct {
    size_t size;
    const char *name;
} dtypes[PST_DTYPE_COUNT] = {
    [PST_FLOAT32] = {4, "float32"},
    [PST_FLOAT64] = {8, "float64"},
    [PST_FLOAT16] = {2, "float16"},
    [PST_BFLOAT16] = {2, "bfloat16"},
    [PST_INT8] = {1, "int8"},
    [PST_UINT8] = {1, "uint8"},
    [PST_INT16] = {2, "int16"},
    [PST_INT32] = {4, "int32"},
    [PST_INT64] = {8, "int64"},
    [PST_BOOL] = {1, "bool"},
    [PST_FLOAT8_E4M3] = {1, "float8_e4m3"},
    [PST_FLOAT8_E5M2] = {1, "float8_e5m2"},
};

size_t pst_dtype_size(pst_dtype dtype) {
    return (unsigned)dtype < PST_DTYPE_COUNT ? dtypes[dtype].size : 0;
}

const char *pst_dtype_name(pst_dtype dtype) {
    return (unsigned)dtype < PST_DTYPE_COUNT ? dtypes[dtype].name : "unknown dtype";
}
