// OpenMP for a program of one thread, for compilers that bring none.
#pragma once

extern "C" {
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}
