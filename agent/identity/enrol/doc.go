// Package enrol owns the protocol by which a host with a token becomes a node.
//
// It believes only a server whose certificate the pinned recovery bundle verifies as service/recovery: the token is
// sent only over such a connection. It never decides when to enrol (the agent does), never touches a file (package
// identity does), and never sends a request with another key than the one on disk.
//
// Guarantees: one request in flight; the same key until the reply is durable or the request refused for good, so that a
// lost reply is sent again; a recovery token with one key alone; a bounded cadence with full jitter that honours
// retry_after; a diagnostic on disk before every retry.
package enrol
