// Package pki owns how a peer is identified: SPIFFE ids, the files that hold certificates, keys and trust bundles, and
// the TLS configurations built from them.
//
// It trusts nothing but the verified chain: an identity is the one URI SAN of a leaf whose chain ends in the bundle of
// its kind, never a common name, a header or a body. A node certificate is accepted only from the node authority, a
// service certificate only from the service authority: neither can issue for the other.
//
// It never signs anything (package pki/ca does) and never uses the network. Both the agent and the services link it, so
// it imports the standard library only.
//
// Guarantees: TLS 1.3 only, no session tickets, so that every connection verifies the peer's certificate anew against
// the bundle that is live at that moment. Files are replaced atomically with mode 0600 and are on disk when the call
// returns. A bundle or key pair that cannot be read leaves the previous one in use.
package pki
