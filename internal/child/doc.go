// Package child runs one operating-system process that belongs to this one.
//
// It owns starting the process in a process group of its own (a Ctrl-C in the terminal reaches the parent alone, which
// then stops its children in order), waiting for it, and the promise that the process is signalled by the kernel when
// the parent dies. It believes only what wait tells it. It never restarts anything: whoever started the process
// decides that.
//
// Guarantees: Done is closed exactly once, after the process has been reaped; Signal never reaches a recycled process id.
package child
