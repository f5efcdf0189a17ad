package pki

// CanaryName is the name in the identity of canary certificates, by which recovery tries whether the ingress trusts
// what the authority issues. A canary certificate is as a node's, so that the ingress treats it as one. No node has the
// name, since node ids are UUIDs, and the agents' port opens no session for it.
const CanaryName = "preflight-canary"

// CanaryID returns the identity of canary certificates.
func CanaryID(trustDomain string) ID { return NodeID(trustDomain, CanaryName) }

// IsCanary reports whether an identity is that of a canary certificate.
func (id ID) IsCanary() bool { return id.Kind == KindNode && id.Name == CanaryName }
