#include "page.hpp"

#include "status.hpp"

#include <cerrno>
#include <cstring>

namespace penstock {
namespace {

constexpr size_t most_place = 256;

std::string describe(const pst_page *page) {
    char text[most_place];
    pst_page_describe(page, text, sizeof text, nullptr);
    return text;
}

} // namespace

Page::Page() {
    if (pst_page_create(&page_) != PST_OK)
        throw StatusError{PST_ESYSTEM,
                          std::string("no memory for the page of this rank: ") + strerror(errno)};
}

std::string Page::describe() const {
    return penstock::describe(page_);
}

void Page::name_units(const std::vector<std::string> &names) {
    std::vector<const char *> texts;
    texts.reserve(names.size());
    for (const std::string &name : names)
        texts.push_back(name.c_str());
    const pst_status status = pst_page_name_units(page_, texts.data(), texts.size());
    if (status != PST_OK) throw StatusError{status, "the units of this rank's page are named"};
}

void Page::reach(uint32_t step, uint32_t unit, int phase, bool is_behind) {
    pst_page_reach(page_, step, unit, static_cast<pst_phase>(phase), is_behind);
}

const pst_page *page_in(const pybind11::buffer_info &info) {
    if (info.size * info.itemsize < static_cast<ssize_t>(PST_PAGE_BYTES))
        throw StatusError{PST_EINVAL, "a page is too small: map all of it"};
    return static_cast<const pst_page *>(info.ptr);
}

std::string describe_page(const pybind11::buffer &buffer) {
    return describe(page_in(buffer.request()));
}

} // namespace penstock
