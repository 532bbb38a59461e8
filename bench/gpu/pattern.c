#include "pattern.h"

#include <string.h>

enum { NOBODY = -1 };

/* Who has used a datum, by index of task. */
typedef struct datum {
    long writer;
    long readers[PATTERN_MOST_AFTER]; /* since it was written */
    size_t reader_count;
} datum;

static int is_left_out(pattern_kind kind, size_t step, size_t column) {
    return kind == SWEEP && column <= step;
}

/* Columns of the row above that a task reads. */
static size_t columns_read(pattern_kind kind, size_t step, size_t column, size_t *columns) {
    const size_t away = kind == FFT ? (size_t)1 << (step - 1) : 1;
    size_t count = 0;
    if (step == 0 || kind == TRIVIAL) return 0;
    columns[count++] = column;
    if (column >= away) columns[count++] = column - away;
    if (kind != SWEEP && column + away < PATTERN_WIDTH) columns[count++] = column + away;
    return count;
}

static void follow(pattern_task *task, long index) {
    if (index == NOBODY) return;
    for (size_t i = 0; i < task->after_count; i++)
        if (task->after[i] == (size_t)index) return;
    task->after[task->after_count++] = (size_t)index;
}

static void read_datum(pattern_task *task, datum *datum, size_t index) {
    follow(task, datum->writer);
    datum->readers[datum->reader_count++] = (long)index;
}

static void write_datum(pattern_task *task, datum *datum, size_t index) {
    follow(task, datum->writer);
    for (size_t i = 0; i < datum->reader_count; i++)
        follow(task, datum->readers[i]);
    datum->writer = (long)index;
    datum->reader_count = 0;
}

static void add(pattern *pattern, pattern_kind kind, datum data[][PATTERN_WIDTH], size_t step,
                size_t column) {
    size_t columns[3];
    const size_t index = pattern->count++;
    pattern_task *task = &pattern->tasks[index];
    task->column = column;
    task->after_count = 0;
    const size_t count = columns_read(kind, step, column, columns);
    for (size_t i = 0; i < count; i++)
        read_datum(task, &data[step - 1][columns[i]], index);
    write_datum(task, &data[step][column], index);
    pattern->edges += task->after_count;
}

void pattern_make(pattern *pattern, pattern_kind kind) {
    static const char *const names[PATTERNS] = {"trivial", "stencil", "FFT", "sweep"};
    datum data[PATTERN_STEPS][PATTERN_WIDTH];
    for (size_t step = 0; step < PATTERN_STEPS; step++)
        for (size_t column = 0; column < PATTERN_WIDTH; column++)
            data[step][column] = (datum){.writer = NOBODY};
    pattern->name = names[kind];
    pattern->count = pattern->edges = 0;
    for (size_t repeat = 0; repeat < PATTERN_REPEATS; repeat++)
        for (size_t step = 0; step < PATTERN_STEPS; step++)
            for (size_t column = 0; column < PATTERN_WIDTH; column++)
                if (!is_left_out(kind, step, column)) add(pattern, kind, data, step, column);
}
