// What the driver needs of a C and C++ library, for a 64-bit Arm program of one thread that has neither.
//
// Two system calls, write and exit, are all that whoever runs it must know. Memory is taken and never given back.

#include <cstddef>
#include <cstdint>
#include <new>

extern "C" {

long write(int to, const void* from, size_t bytes) {
  register long x0 asm("x0") = to, x1 asm("x1") = (long)from, x2 asm("x2") = (long)bytes, number asm("x8") = 64;
  asm volatile("svc 0" : "+r"(x0) : "r"(x1), "r"(x2), "r"(number) : "memory");
  return x0;
}

[[noreturn]] void leave(long code) {
  register long x0 asm("x0") = code, number asm("x8") = 93;
  asm volatile("svc 0" ::"r"(x0), "r"(number));
  __builtin_unreachable();
}

void abort() { leave(134); }

asm(".global _start\n_start: mov x29, #0\n mov x30, #0\n bl main\n bl leave\n");

void* memcpy(void* to, const void* from, size_t n) {
  for (size_t i = 0; i < n; i++) ((char*)to)[i] = ((const char*)from)[i];
  return to;
}
void* memmove(void* to, const void* from, size_t n) {
  if (to <= from) return memcpy(to, from, n);
  while (n--) ((char*)to)[n] = ((const char*)from)[n];
  return to;
}
void* memset(void* to, int value, size_t n) {
  for (size_t i = 0; i < n; i++) ((char*)to)[i] = (char)value;
  return to;
}
int memcmp(const void* a, const void* b, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (int more = ((const uint8_t*)a)[i] - ((const uint8_t*)b)[i]) return more;
  return 0;
}
size_t strlen(const char* text) {
  size_t n = 0;
  while (text[n]) n++;
  return n;
}

int omp_get_thread_num() { return 0; }
int omp_get_num_threads() { return 1; }

void* __dso_handle = nullptr;
int __cxa_thread_atexit(void (*)(void*), void*, void*) { return 0; }
}

const std::nothrow_t std::nothrow{};

static void* take(size_t bytes, size_t alignment) {
  alignas(64) static char memory[64 << 20];
  static size_t used = 0;
  used = (used + alignment - 1) / alignment * alignment;
  if (bytes > sizeof memory - used) abort();
  used += bytes;
  return memory + used - bytes;
}

void* operator new(size_t bytes) { return take(bytes, 16); }
void* operator new(size_t bytes, std::align_val_t alignment) { return take(bytes, (size_t)alignment); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return take(bytes, 16); }
void operator delete(void*) noexcept {}
void operator delete(void*, size_t) noexcept {}
void operator delete(void*, std::align_val_t) noexcept {}
void operator delete(void*, size_t, std::align_val_t) noexcept {}

// A thread's own variables, as -femulated-tls finds them.
struct Own {
  size_t bytes, alignment;
  void* at;
  const void* initial;
};

extern "C" void* __emutls_get_address(Own* own) {
  if (!own->at) {
    own->at = take(own->bytes, own->alignment);
    if (own->initial) memcpy(own->at, own->initial, own->bytes);
    else memset(own->at, 0, own->bytes);
  }
  return own->at;
}
