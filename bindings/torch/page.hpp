// The page of this rank (penstock/page.h), as Python writes it, and those of others, as it maps
// them.
#pragma once

#include <penstock/page.h>

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

namespace penstock {

// One thread at a time writes; a child of fork has its parent's, and writes nothing.
class Page {
  public:
    Page();
    ~Page() {
        pst_page_destroy(page_);
    }
    Page(const Page &) = delete;
    Page &operator=(const Page &) = delete;

    pst_page *get() const {
        return page_;
    }
    int descriptor() const {
        return page_->descriptor;
    }
    // How many places the program has been at.
    uint64_t count() const {
        return page_->place.count;
    }
    std::string describe() const;
    void name_units(const std::vector<std::string> &names);
    void reach(uint32_t step, uint32_t unit, int phase, bool is_behind);

  private:
    pst_page *page_ = nullptr;
};

// The memory of a buffer that is long enough for a page; throws EINVAL if it is not.
const pst_page *page_in(const pybind11::buffer_info &info);
// Where the rank is whose page a buffer is.
std::string describe_page(const pybind11::buffer &buffer);

} // namespace penstock
