// Package pgserver runs a small Postgres of our own, for `gpuaas dev`, the drills and the tests.
//
// It owns a directory: the data, the superuser's generated password beside it (0600), the server's log, and a lock that
// keeps a second owner out. It takes a process for Postgres on that data only if the working directory of the process
// is the data directory; a pid in a file is a hint. It never turns fsync off (it reads the setting of the running
// server and stops it otherwise), never accepts a connection without a password, local sockets included, since workload
// uids share the host, and never runs as root: as root it drops to an unprivileged uid.
//
// Guarantees: Start after any kind of death (ours, Postgres's, the machine's) either yields a server that accepts
// connections or an error that says what to do; a server never outlives the process that started it on Linux; data
// survives everything but Wipe by the owner of the directory. Only a Temporary, which is for tests, removes its
// directory at its end.
package pgserver
