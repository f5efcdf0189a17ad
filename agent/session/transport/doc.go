// Package transport decides how an agent reaches the node API below grpc: which address of a name an opening takes, how
// long each phase of it may last, and what a failure means that grpc reports only as text, with the wait that an edge
// asked for.
//
// It knows no frame, no certificate of the node and no wait between tries: package session opens, and decides what
// follows from an error.
package transport
