package pki

import (
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"
)

// Kind is the kind of peer that an identity names.
type Kind string

// The two kinds of identity. Each has an authority of its own.
const (
	KindNode    Kind = "node"
	KindService Kind = "service"
)

const (
	scheme    = "spiffe"
	maxIDSize = 255
)

// ErrID is wrapped by every refusal to read an identity.
var ErrID = errors.New("not an identity of this mesh")

// ID is a SPIFFE identity of the mesh: spiffe://<trust domain>/<kind>/<name>. The zero value is no identity.
type ID struct {
	TrustDomain string
	Kind        Kind
	Name        string // the node id, or the service's name
}

// NodeID returns the identity of a node.
func NodeID(trustDomain, nodeID string) ID {
	return ID{TrustDomain: trustDomain, Kind: KindNode, Name: nodeID}
}

// ServiceID returns the identity of a service.
func ServiceID(trustDomain, name string) ID {
	return ID{TrustDomain: trustDomain, Kind: KindService, Name: name}
}

// String returns the identity as a URI.
func (id ID) String() string {
	return scheme + "://" + id.TrustDomain + "/" + string(id.Kind) + "/" + id.Name
}

// URL returns the identity as a certificate carries it.
func (id ID) URL() *url.URL {
	return &url.URL{Scheme: scheme, Host: id.TrustDomain, Path: "/" + string(id.Kind) + "/" + id.Name}
}

// IsZero reports whether id is no identity.
func (id ID) IsZero() bool { return id == ID{} }

// Validate refuses an identity whose spelling would not survive a round trip through a URI. The error wraps ErrID.
func (id ID) Validate() error {
	switch {
	case !validTrustDomain(id.TrustDomain):
		return fmt.Errorf("%w: trust domain %q", ErrID, id.TrustDomain)
	case id.Kind != KindNode && id.Kind != KindService:
		return fmt.Errorf("%w: kind %q", ErrID, string(id.Kind))
	case !validSegment(id.Name):
		return fmt.Errorf("%w: name %q", ErrID, id.Name)
	case len(id.String()) > maxIDSize:
		return fmt.Errorf("%w: longer than %d bytes", ErrID, maxIDSize)
	}
	return nil
}

// ParseID reads a SPIFFE URI. It accepts exactly one spelling of each identity: no user, port, query, fragment, escape,
// empty or dotted segment. The error wraps ErrID.
func ParseID(raw string) (ID, error) {
	rest, ok := strings.CutPrefix(raw, scheme+"://")
	if !ok || len(raw) > maxIDSize {
		return ID{}, fmt.Errorf("%w: %q", ErrID, clip(raw))
	}
	parts := strings.Split(rest, "/")
	if len(parts) != 3 {
		return ID{}, fmt.Errorf("%w: %q", ErrID, clip(raw))
	}
	id := ID{TrustDomain: parts[0], Kind: Kind(parts[1]), Name: parts[2]}
	if err := id.Validate(); err != nil {
		return ID{}, err
	}
	return id, nil
}

func validTrustDomain(s string) bool { return trustDomainText.MatchString(s) }

var trustDomainText = regexp.MustCompile(`^[a-z0-9_-]([a-z0-9._-]*[a-z0-9_-])?$`)

func validSegment(s string) bool { return s != "." && s != ".." && segmentText.MatchString(s) }

var segmentText = regexp.MustCompile(`^[A-Za-z0-9._-]+$`)

// clip bounds the text that an unverified peer can put into a log line.
func clip(s string) string {
	if len(s) > maxIDSize {
		return s[:maxIDSize] + "..."
	}
	return s
}
