#include "python_frames.h"

#include <Python.h>

#include <atomic>

namespace simulated {
namespace {

constexpr int kMaxFrames = 5;
std::atomic<bool> frames_on{true};

// torch's own layers say little about who asked; its distributed package and optimizers do.
bool is_plumbing(const std::string& path) {
  if (path.find("/torch/") == std::string::npos)
    return path.find("contextlib.py") != std::string::npos;
  return path.find("/torch/distributed/") == std::string::npos &&
         path.find("/torch/optim/") == std::string::npos;
}

std::string of_stack() {
  std::string text;
  int num_frames = 0;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr && num_frames < kMaxFrames) {
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
  PyErr_Clear();
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
