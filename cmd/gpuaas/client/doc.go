// Package client owns the commands by which people and scripts ask the mesh: what they send, how they wait, and what they print.
//
// It believes the answers of the one server that proves to be the mesh's (its identity under the context's authority), and the contexts file if
// nobody else may read it. It never decides what is possible: the owners do, and their refusal is printed as they wrote it. It never prints a token
// except where it was asked for as data.
//
// Guarantees: data goes to stdout, everything else to stderr; what is piped has no colours and no decoration; the exit code says what happened
// (see Exit); every read that follows a command in the same run sees that command's effect or says that it could not.
//
//	context (contexts file, flags, environment) → connection (TLS 1.3, bearer token) → one command → printer (table, JSON, YAML, names)
package client
