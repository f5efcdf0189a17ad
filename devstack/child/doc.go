// Package child runs one operating-system process that belongs to this one.
//
// It owns starting the process in a process group of its own (a Ctrl-C in the terminal reaches the parent alone, which
// then stops its children in order), waiting for it, and the guarantee that the kernel signals the process when the
// parent dies. It takes a process as ended only when wait returns. It never restarts a process: the caller that started
// it decides that.
//
// Guarantees: Done is closed exactly once, after the process has been reaped; Signal never reaches a recycled process
// id.
package child
