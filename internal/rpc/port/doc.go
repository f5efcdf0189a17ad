// Package port serves services of Connect on one port over mutual TLS: it listens, routes by exact procedure, bounds
// what strangers may cost, offers health and reflection, and drains.
//
// A method without a policy stops the server from starting. The caller of a request is identified before a byte of its
// body is read, and bodies are bounded in size, also after decompression, and in time. Streams end in order when the
// server drains, and when the certificate that opened them expires. Whether a call reaches its method is decided by
// package guard.
package port
