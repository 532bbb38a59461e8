#include "places.hpp"

#include <fstream>
#include <iterator>
#include <unistd.h>

namespace penstock {
namespace {

uint64_t read_word(const uint64_t *word) {
    // Relaxed: a place that is a moment old is as good.
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

// The letter that the system has for the state of a process; 0: there is none.
char state_of(int64_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    const std::string stat{std::istreambuf_iterator<char>(file), {}};
    const size_t name_end = stat.rfind(") ");
    return name_end == std::string::npos || name_end + 2 >= stat.size() ? '\0' : stat[name_end + 2];
}

std::string describe_process(int64_t pid) {
    if (pid == getpid()) return {};
    const char state = state_of(pid);
    const char *what = state == 'T' || state == 't'                    ? " is stopped"
                       : state == '\0' || state == 'Z' || state == 'X' ? " has ended"
                                                                       : nullptr;
    return what == nullptr ? std::string() : "its process " + std::to_string(pid) + what;
}

} // namespace

std::string Places::describe(uint64_t place) const {
    const uint64_t step = place >> 32, unit = place >> 8 & 0xFFFFFF, kind = place >> 1 & 0x7F;
    if (kind == 0 || kind >= kinds_.size()) return "before the first forward";
    const std::string where = (place & 1) != 0 ? "behind " : "in ";
    const std::string number = "step " + std::to_string(step);
    if (unit == 0 || unit >= units_.size())
        return where + "the " + kinds_[kind] + " (" + number + ")";
    return where + "'" + units_[unit] + "' (" + number + ", " + kinds_[kind] + ")";
}

std::string describe_page(const Places &places, const Page &page, uint64_t *since) {
    *since = read_word(&page.words[2]);
    const std::string place = places.describe(read_word(&page.words[1]));
    const std::string process = describe_process(page.pid);
    return process.empty() ? place : place + "; " + process;
}

} // namespace penstock
