// Package rpc owns how services are called: the servers and clients of Connect over mutual TLS, and the checks before
// every method.
//
// It trusts the verified TLS chain for the caller, the method options of the protos for the permitted callers, and the
// configured public keys of readmodel for the person on whose behalf the caller acts. It never decides about an object:
// the owner of a method does, with the caller and the person that this package puts into the context.
//
//	handshake (package pki) → peer of the chain → allow-list of the method → person → validation → the method → sanitised error
//
// Guarantees: a method without a policy stops the server from starting; a request reaches a method only if its caller
// is in that method's list; a person's assertion is good for one request, for 60 seconds, once; a client gets a fault's
// sentence or "internal error", and this package logs the cause once. Streams end in order when the server drains, and
// when the certificate that opened them expires.
package rpc
