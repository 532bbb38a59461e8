// embed_tbb.cpp - Penstock and oneTBB hand work to each other.
//
// oneTBB tasks fill the pieces of an array and open a gate each. Behind each gate stands a Penstock
// task that lets oneTBB sum the piece, and is done when that is; "total" adds up the sums. The
// lanes are pumped: who waits for the launch drives them, and no thread is Penstock's own.
#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <numeric>
#include <penstock/penstock.h>
#include <stdexcept>
#include <string>
#include <tbb/task_arena.h>
#include <tbb/task_group.h>
#include <vector>

namespace {

constexpr std::size_t pieces = 4;
constexpr std::size_t piece_size = 100000;
constexpr std::uint64_t launches = 3;

class Program;

struct Piece {
    Program *owner = nullptr;
    std::vector<std::uint64_t> values = std::vector<std::uint64_t>(piece_size);
    std::uint64_t sum = 0;
    std::atomic<bool> summed{false};
    pst_lane *lane = nullptr; // one a piece: a lane's tasks run one after the other
    pst_task filled{}, task{};
};

class Program {
  public:
    Program() {
        check(pst_runtime_create(nullptr, &runtime_));
        try {
            build();
        } catch (...) {
            pst_runtime_destroy(runtime_);
            throw;
        }
    }
    ~Program() {
        arena_.execute([this] { group_.wait(); }); // what oneTBB still runs uses the lanes
        pst_runtime_destroy(runtime_);
    }
    Program(const Program &) = delete;
    Program &operator=(const Program &) = delete;

    std::uint64_t run(std::uint64_t first) {
        pst_launch launch{};
        check(pst_graph_launch(graph_, &launch));
        for (std::size_t i = 0; i < pieces; i++)
            in_tbb([this, launch, first, i] {
                Piece &piece = pieces_[i];
                std::iota(piece.values.begin(), piece.values.end(), first + i * piece_size);
                if (pst_gate_open(launch, piece.filled, nullptr) != PST_OK)
                    pst_runtime_poison(runtime_, PST_ESTATE, "a gate could not be opened");
            });
        check(pst_launch_wait(launch)); // and drives the lanes
        return total_;
    }

  private:
    template <typename Work> void in_tbb(Work work) {
        arena_.enqueue(group_.defer(std::move(work)));
    }

    // Runs on the thread that drives the lane: hands the piece to oneTBB and returns at once.
    static pst_status sum_start(void *argument, pst_stream *) {
        auto *piece = static_cast<Piece *>(argument);
        piece->summed.store(false, std::memory_order_relaxed);
        piece->owner->in_tbb([piece] {
            piece->sum =
                std::accumulate(piece->values.begin(), piece->values.end(), std::uint64_t{0});
            piece->summed.store(true, std::memory_order_release);
            pst_lane_wake(piece->lane); // nobody has to poll
        });
        return PST_PENDING;
    }

    static pst_status sum_test(void *argument) {
        const auto *piece = static_cast<const Piece *>(argument);
        return piece->summed.load(std::memory_order_acquire) ? PST_OK : PST_PENDING;
    }

    static pst_status add_up(void *argument, pst_stream *) {
        auto *self = static_cast<Program *>(argument);
        self->total_ = 0;
        for (const Piece &piece : self->pieces_)
            self->total_ += piece.sum;
        return PST_OK;
    }

    pst_lane *make_lane(const char *name) {
        pst_lane_options options{};
        pst_lane *lane = nullptr;
        options.size = sizeof options;
        options.name = name;
        options.mode = PST_LANE_PUMPED;
        check(pst_lane_create(runtime_, &options, &lane));
        return lane;
    }

    pst_task add(const char *name, pst_lane *lane, pst_work work,
                 const std::vector<pst_task> &after) {
        pst_task_options options{};
        pst_task task{};
        options.size = sizeof options;
        options.name = name;
        options.lane = lane;
        options.work = work;
        options.after = after.data();
        options.after_count = after.size();
        check(pst_graph_add(graph_, &options, &task));
        return task;
    }

    void build() {
        std::vector<pst_task> sums;
        check(pst_graph_create(runtime_, PST_GRAPH_SEALED, "sums", &graph_));
        for (Piece &piece : pieces_) {
            piece.owner = this;
            piece.lane = make_lane("sum");
            check(pst_graph_add_gate(graph_, "filled", &piece.filled));
            piece.task = add("sum", piece.lane, {sum_start, sum_test, &piece}, {piece.filled});
            sums.push_back(piece.task);
        }
        (void)add("total", make_lane("total"), {add_up, nullptr, this}, sums);
        check(pst_graph_seal(graph_));
    }

    void check(pst_status status) const {
        if (status == PST_OK) return;
        std::string text(256, '\0');
        text.resize(std::min(text.size(), pst_runtime_error(runtime_, text.data(), text.size())));
        throw std::runtime_error(std::string(pst_status_text(status)) + ": " + text);
    }

    pst_runtime *runtime_ = nullptr;
    pst_graph *graph_ = nullptr;
    Piece pieces_[pieces];
    std::uint64_t total_ = 0;
    tbb::task_arena arena_{2};
    tbb::task_group group_;
};

} // namespace

int main() {
    try {
        Program program;
        for (std::uint64_t first = 0; first < launches; first++)
            std::printf("values from %" PRIu64 ": sum %" PRIu64 "\n", first, program.run(first));
    } catch (const std::exception &error) {
        std::fprintf(stderr, "embed_tbb: %s\n", error.what());
        return 1;
    }
    return 0;
}
