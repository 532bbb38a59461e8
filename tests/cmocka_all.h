/* cmocka.h and the headers that it wants before it. */
#ifndef PST_TESTS_CMOCKA_ALL_H
#define PST_TESTS_CMOCKA_ALL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#endif
