package rpc

import (
	"context"
	"slices"

	"github.com/gpuaas/mesh/internal/pki"
)

// Person is the person on whose behalf a request is made. The owner of an object decides what the person may do to it.
type Person struct {
	Subject  string // as the identity provider names the person
	TenantID string // empty for people of the operator
	Roles    []string
}

// Has reports whether the person has one of the roles.
func (p Person) Has(roles ...string) bool {
	return slices.ContainsFunc(roles, func(role string) bool { return slices.Contains(p.Roles, role) })
}

// Operator reports whether the person is an operator. A person who is bound to a tenant is none, whatever the roles: an
// operator's requests affect machines that tenants share.
func (p Person) Operator() bool { return p.TenantID == "" && p.Has("operator") }

type (
	peerKey   struct{}
	personKey struct{}
)

// PeerFrom returns the verified certificate of the caller, if it has one.
func PeerFrom(ctx context.Context) (pki.Peer, bool) {
	peer, ok := ctx.Value(peerKey{}).(pki.Peer)
	return peer, ok
}

// WithPeer puts a verified peer into a context. It is for transports and for tests of methods.
func WithPeer(ctx context.Context, peer pki.Peer) context.Context {
	return context.WithValue(ctx, peerKey{}, peer)
}

// PersonFrom returns the person on whose behalf the request is made, if there is one.
func PersonFrom(ctx context.Context) (Person, bool) {
	person, ok := ctx.Value(personKey{}).(Person)
	return person, ok
}

// WithPerson puts an authenticated person into a context. On the client side assertion.Signer asserts that person.
func WithPerson(ctx context.Context, person Person) context.Context {
	return context.WithValue(ctx, personKey{}, person)
}

// CallerOf returns the name of a peer as policies spell it: a service's name, node, or anonymous without one.
func CallerOf(ctx context.Context) string {
	peer, ok := PeerFrom(ctx)
	switch {
	case !ok:
		return CallerAnonymous
	case peer.ID.Kind == pki.KindService:
		return peer.ID.Name
	case peer.ID.Kind == pki.KindNode:
		return CallerNode
	default:
		return ""
	}
}
