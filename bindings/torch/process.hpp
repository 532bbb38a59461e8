// Whose an object is: a child of fork has copies of its parent's objects, and none of the threads
// that they live by.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

namespace penstock {

// The process that this was made in. Copies stay that one's.
class Process {
  public:
    Process();
    bool is_this() const; // costs a load

  private:
    uint32_t generation_;
};

// A `Made` that ends only in the process that made it. In a child of fork its memory, and whatever
// it holds, stays as it is: a destructor there would wait for threads that are not there.
template <typename Made, typename... Arguments>
std::shared_ptr<Made> make_own(Arguments &&...arguments) {
    return std::shared_ptr<Made>(new Made(std::forward<Arguments>(arguments)...),
                                 [home = Process()](Made *made) {
                                     if (home.is_this()) delete made;
                                 });
}

} // namespace penstock
