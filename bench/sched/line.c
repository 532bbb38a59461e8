#include "line.h"

#include "figures.h"
#include "shape.h"

#include <pthread.h>
#include <stdatomic.h>

enum { TRIPS = 201 };

/* Odd: the other thread's turn; even: ours. */
typedef struct ball {
    _Alignas(64) atomic_int side;
} ball;

static void *play(void *argument) {
    ball *ball = argument;
    for (int trip = 0; trip < TRIPS; trip++) {
        while (atomic_load_explicit(&ball->side, memory_order_acquire) != 2 * trip + 1) {
        }
        atomic_store_explicit(&ball->side, 2 * trip + 2, memory_order_release);
    }
    return NULL;
}

static double trip_time(ball *ball, int trip) {
    double begin = bench_now();
    atomic_store_explicit(&ball->side, 2 * trip + 1, memory_order_release);
    while (atomic_load_explicit(&ball->side, memory_order_acquire) != 2 * trip + 2) {
    }
    return bench_now() - begin;
}

double bench_line_round_trip(void) {
    ball ball = {0};
    double times[TRIPS];
    pthread_t other;
    if (pthread_create(&other, NULL, play, &ball) != 0) return 0;
    for (int trip = 0; trip < TRIPS; trip++)
        times[trip] = trip_time(&ball, trip);
    pthread_join(other, NULL);
    return bench_median(times, TRIPS);
}
