// Package client owns the commands with which people and scripts use the mesh: what they send, how they wait, and what
// they print.
//
// It trusts the answers of the one server that proves to be the mesh's (its identity under the context's authority),
// and the contexts file if no other user may read it. It does not decide what is possible: the owners do, and their
// refusal is printed as they wrote it. It prints a token only if the person asks for it as data.
//
// Guarantees: data goes to stdout, everything else to stderr; output to a pipe has no colours and no decoration; the
// exit code gives the result (see Exit); every read that follows a command in the same run sees that command's effect,
// or the output notes that it does not.
//
//	context (contexts file, flags, environment) → connection (TLS 1.3, bearer token) → one command
//	    → printer (table, JSON, YAML, names)
package client
