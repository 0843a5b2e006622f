// Where the running Python code is, for reports.
#pragma once

#include <string>

namespace simulated {

// The innermost functions that are not torch's own plumbing: "file.py:12 f < file.py:90 g".
// "autograd" on a thread that runs no Python. Takes Python's global lock.
std::string where();

// The same on a thread that Python knows; "" on others, which need not wait for the lock then.
// (torch lets go of the lock before it frees a tensor.)
std::string where_on_python_thread();

// Whether to look at frames at all; it costs a few microseconds for each operator.
void set_frames(bool is_on);

// Lets other Python threads run while this one waits.
class WithoutPythonLock {
 public:
  WithoutPythonLock();
  ~WithoutPythonLock();
  WithoutPythonLock(const WithoutPythonLock&) = delete;
  WithoutPythonLock& operator=(const WithoutPythonLock&) = delete;

 private:
  void* saved_ = nullptr;
};

}  // namespace simulated
