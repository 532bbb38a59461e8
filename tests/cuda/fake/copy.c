/* Copies and flags: operations on memory that the streams run. */
#include "internal.h"

static void *at(CUdeviceptr address) {
    return (void *)(uintptr_t)address;
}

static int copy_rows(operation *self) {
    for (size_t row = 0; row < self->of.copy.rows; row++)
        memmove(at(self->of.copy.destination + row * self->of.copy.destination_pitch),
                at(self->of.copy.source + row * self->of.copy.source_pitch), self->of.copy.bytes);
    return 1;
}

static CUresult enqueue_copy(CUstream stream, CUdeviceptr destination, CUdeviceptr source,
                             size_t bytes) {
    const operation made = {
        .run = copy_rows,
        .of.copy = {.destination = destination, .source = source, .bytes = bytes, .rows = 1}};
    return fake_enqueue(stream, &made);
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t bytes,
                               CUstream stream) {
    CALL(cuMemcpyAsync, stream);
    return fake_end(enqueue_copy(stream, destination, source, bytes));
}

CUresult fake_cuMemcpyBatchAsync(CUdeviceptr *destinations, CUdeviceptr *sources, size_t *bytes,
                                 size_t count, CUmemcpyAttributes *attributes, size_t *indices,
                                 size_t attribute_count, size_t *failed, CUstream stream);

/* With the driver's conditions: no default stream, no empty copy, an attribute from the first on.
 */
CUresult fake_cuMemcpyBatchAsync(CUdeviceptr *destinations, CUdeviceptr *sources, size_t *bytes,
                                 size_t count, CUmemcpyAttributes *attributes, size_t *indices,
                                 size_t attribute_count, size_t *failed, CUstream stream) {
    CALL(cuMemcpyBatchAsync, stream);
    CUresult result = CUDA_SUCCESS;
    if (fake_is_captured(stream)) return fake_end(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (count == 0 || stream == NULL || stream == CU_STREAM_LEGACY || attribute_count != 1 ||
        indices[0] != 0 || attributes->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
        result = CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
        *failed = i;
        result = bytes[i] == 0 ? CUDA_ERROR_INVALID_VALUE
                               : enqueue_copy(stream, destinations[i], sources[i], bytes[i]);
    }
    return fake_end(result);
}

CUresult CUDAAPI cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream) {
    CALL(cuMemcpy2DAsync, stream);
    if (copy->srcMemoryType != CU_MEMORYTYPE_UNIFIED ||
        copy->dstMemoryType != CU_MEMORYTYPE_UNIFIED || copy->WidthInBytes > copy->srcPitch ||
        copy->WidthInBytes > copy->dstPitch)
        return fake_end(CUDA_ERROR_INVALID_VALUE);
    const operation made = {.run = copy_rows,
                            .of.copy = {copy->dstDevice, copy->srcDevice, copy->dstPitch,
                                        copy->srcPitch, copy->WidthInBytes, copy->Height}};
    return fake_end(fake_enqueue(stream, &made));
}

/* ---- flags: other processes write and read them too --------------------------------- */

/* Release: what the stream did before is seen by whoever finds the flag up (has_come). */
static int write_flag(operation *self) {
    __atomic_store_n((uint32_t *)at(self->of.flag.address), self->of.flag.value, __ATOMIC_RELEASE);
    return 1;
}

CUresult CUDAAPI cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                         unsigned flags) {
    CALL(cuStreamWriteValue32, stream);
    if (flags != CU_STREAM_WRITE_VALUE_DEFAULT || address % 4 != 0 || !fake_reaches(address, 4))
        return fake_end(CUDA_ERROR_INVALID_VALUE);
    const operation made = {.run = write_flag, .of.flag = {address, value}};
    return fake_end(fake_enqueue(stream, &made));
}

/* Acquire: pairs with the release in write_flag, also of another process. */
static int has_come(operation *self) {
    const uint32_t seen = __atomic_load_n((uint32_t *)at(self->of.flag.address), __ATOMIC_ACQUIRE);
    return (int32_t)(seen - self->of.flag.value) >= 0;
}

CUresult CUDAAPI cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                        unsigned flags) {
    CALL(cuStreamWaitValue32, stream);
    if (flags != CU_STREAM_WAIT_VALUE_GEQ || address % 4 != 0 || !fake_reaches(address, 4))
        return fake_end(CUDA_ERROR_INVALID_VALUE);
    const operation made = {.run = has_come, .of.flag = {address, value}};
    return fake_end(fake_enqueue(stream, &made));
}

/* As on a GPU (H200, driver 580): a write that leaves out its ordering is refused. */
static int operation_is_good(const CUstreamBatchMemOpParams *given) {
    const CUdeviceptr address = given->waitValue.address;
    if (address % 4 != 0 || !fake_reaches(address, 4)) return 0;
    if (given->operation == CU_STREAM_MEM_OP_WAIT_VALUE_32)
        return given->waitValue.flags == CU_STREAM_WAIT_VALUE_GEQ;
    return given->operation == CU_STREAM_MEM_OP_WRITE_VALUE_32 &&
           given->writeValue.flags == CU_STREAM_WRITE_VALUE_DEFAULT;
}

CUresult CUDAAPI cuStreamBatchMemOp_v2(CUstream stream, unsigned count,
                                       CUstreamBatchMemOpParams *all, unsigned flags) {
    CALL(cuStreamBatchMemOp, stream);
    if (count == 0 || count > 256 || flags != 0) return fake_end(CUDA_ERROR_INVALID_VALUE);
    for (unsigned i = 0; i < count; i++)
        if (!operation_is_good(&all[i])) return fake_end(CUDA_ERROR_INVALID_VALUE);
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++) {
        const int waits = all[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_32;
        const operation made = {.run = waits ? has_come : write_flag,
                                .of.flag = {all[i].waitValue.address, all[i].waitValue.value}};
        result = fake_enqueue(stream, &made);
    }
    return fake_end(result);
}
