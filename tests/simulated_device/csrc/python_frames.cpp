#include "python_frames.h"

#include <Python.h>

#include <atomic>
#include <cstdlib>

namespace simulated {
namespace {

int max_frames() {
  static const int given = [] {
    const char* text = std::getenv("SIMULATED_DEVICE_FRAMES");
    return text == nullptr ? 5 : std::atoi(text);
  }();
  return given;
}

std::atomic<bool> frames_on{true};

// torch's own layers say little about who asked; those of its distributed package do.
bool is_plumbing(const std::string& path) {
  auto has = [&](const char* part) { return path.find(part) != std::string::npos; };
  if (has("distributed_c10d.py") || has("c10d_logger.py") || has("contextlib.py")) return true;
  return has("/torch/") && !has("/torch/distributed/");
}

std::string of_stack() {
  // An exception may be on its way: what the tensors of its frames free is looked at, too.
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  std::string text;
  int num_frames = 0;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr && num_frames < max_frames()) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* path = PyUnicode_AsUTF8(code->co_filename);
    const char* name = PyUnicode_AsUTF8(code->co_name);
    if (path != nullptr && name != nullptr && !is_plumbing(path)) {
      std::string file = path;
      file = file.substr(file.rfind('/') + 1);
      text += (num_frames ? " < " : "") + file + ":" +
              std::to_string(PyFrame_GetLineNumber(frame)) + " " + name;
      num_frames++;
    }
    Py_DECREF(code);
    PyFrameObject* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  PyErr_Restore(type, value, trace);
  return text.empty() ? "autograd" : text;
}

#if PY_VERSION_HEX >= 0x030D0000
bool is_ending() { return Py_IsFinalizing(); }
#else
bool is_ending() { return _Py_IsFinalizing(); }
#endif

bool has_python() { return frames_on && Py_IsInitialized() && !is_ending(); }

}  // namespace

std::string where() {
  if (!has_python()) return "";
  PyGILState_STATE state = PyGILState_Ensure();
  std::string text = of_stack();
  PyGILState_Release(state);
  return text;
}

std::string where_on_python_thread() {
  return has_python() && PyGILState_GetThisThreadState() != nullptr ? where() : "";
}

void set_frames(bool is_on) { frames_on = is_on; }

WithoutPythonLock::WithoutPythonLock() {
  if (Py_IsInitialized() && PyGILState_Check()) saved_ = PyEval_SaveThread();
}

WithoutPythonLock::~WithoutPythonLock() {
  if (saved_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(saved_));
}

}  // namespace simulated
