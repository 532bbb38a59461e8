// Where the ranks of this machine are in their training, as their pages say it (_page.py): read
// without the interpreter, also when its owner is stopped or has ended.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace penstock {

// A place is a number: step (32 bits), unit (24), kind (7), whether it is behind it (1).
class Places {
  public:
    // `kinds`: of phases, the first for none; `units`: their names, the root's first.
    Places(std::vector<std::string> kinds, std::vector<std::string> units)
        : kinds_(std::move(kinds)), units_(std::move(units)) {}
    // A place of any rank with the same model.
    std::string describe(uint64_t place) const;

  private:
    std::vector<std::string> kinds_, units_;
};

// A rank's page: how many places it has been at, which one it is at, and since when in nanoseconds
// of CLOCK_MONOTONIC. Its owner writes it while others read it: each word by itself is whole.
struct Page {
    const uint64_t *words;
    int64_t pid; // whose it is
};

// What is known of a rank: its place, and what is wrong with its process.
std::string describe_page(const Places &places, const Page &page, uint64_t *since);

} // namespace penstock
