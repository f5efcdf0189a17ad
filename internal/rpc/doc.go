// Package rpc has the identity of a call: the peer that makes it, the person that it is made for, the ids by which its
// log lines are found, and the policy of the method that is called. The packages below it serve and make calls.
//
//	handshake (pki) → peer of the chain → allow-list of the method → person → validation → the method → sanitised error
//	└── port ─────┘ └────────────── guard, with assertion and codec ──────────────┘
//
// The packages trust the verified TLS chain for the caller, the method options of the protos for the permitted callers,
// and the configured public keys of readmodel for the person on whose behalf the caller acts. They never decide about
// an object: the owner of a method does, with the caller and the person that the context has.
//
// This package reads policies and does not apply them: package guard does. It knows no transport.
package rpc
