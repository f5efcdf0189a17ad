// Package enrol owns the conversation in which a host with a token becomes a node.
//
// It believes the server whose certificate the pinned recovery bundle verifies as service/recovery, and nothing before that: the token leaves only
// over such a connection. It never decides when to enrol (the agent does), never touches a file (package identity does), and never asks with another
// key than the one that is on disk.
//
// Guarantees: one request in flight; the same key until the answer is durable or refused for good, so that a lost answer is given again; a bounded
// cadence with full jitter that honours retry_after; a diagnostic on disk before every retry.
package enrol
