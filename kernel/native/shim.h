// What the two files of the shim share; hidden from everybody else.
#ifndef COVE_SHIM_H
#define COVE_SHIM_H

#include <stdint.h>
#include <sys/types.h>

#pragma GCC visibility push(hidden)

enum { EXIT_SETUP = 71 };

extern void (*cove_before_fork)(void), (*cove_after_child)(void), (*cove_after_parent)(void);
extern int *cove_tid_address;
extern uint64_t cove_heap_start; // 0: not known

void cove_register_thread(void);
pid_t cove_clone_copy(void);                         // a fork whose parent is ours
int cove_arena_holds(uint64_t address, uint64_t len); // in the interpreter's arenas

#pragma GCC visibility pop
#endif
