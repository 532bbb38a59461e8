#include "driver.h"

#include <stdio.h>
#include <stdlib.h>

void driver_check(CUresult result, const char *call) {
    const char *name = "";
    if (result == CUDA_SUCCESS) return;
    (void)cuGetErrorName(result, &name);
    fprintf(stderr, "%s: %s\n", call, name);
    exit(1);
}
