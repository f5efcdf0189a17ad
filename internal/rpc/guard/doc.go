// Package guard decides whether a call reaches its method: the caller is in the list of the method's policy, the person
// is authenticated or asserted and has a role of the policy, and the message is valid. It does so for methods of
// Connect and for frames of a stream that stand for calls; nodeapi's port, of grpc-go, has a check of its own.
//
// A request reaches a method only if its caller is in that method's list. The client gets a fault's sentence or
// "internal error", and the guard logs the cause once, and counts it. The guard does not read from connections and does
// not bound them: package port does.
package guard
