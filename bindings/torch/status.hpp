// A C status as a C++ exception, and that as penstock.PenstockError.
#pragma once

#include <penstock/runtime.h>

#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <string>

namespace penstock {

struct StatusError {
    pst_status status;
    std::string text;
};

inline std::string runtime_error_text(const pst_runtime *runtime) {
    std::string text(pst_runtime_error(runtime, nullptr, 0), '\0');
    if (!text.empty()) pst_runtime_error(runtime, text.data(), text.size() + 1);
    return text;
}

// A text of the library in Python. Names and peers' words may be cut in a character, which must not
// hide what is said. The interpreter is held here and below.
inline pybind11::object to_python(const std::string &text) {
    return pybind11::bytes(text).attr("decode")("utf-8", "backslashreplace");
}

inline void set_python_error(const StatusError &error) {
    pybind11::object type = pybind11::module_::import("penstock._errors").attr("PenstockError");
    pybind11::object value = type(pst_status_name(error.status), to_python(error.text));
    PyErr_SetObject(type.ptr(), value.ptr());
}

inline void translate_error(std::exception_ptr pointer) {
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const StatusError &error) {
        set_python_error(error);
    }
}

} // namespace penstock
