package secretenv

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Owner is the workspace that sealed values belong to.
type Owner struct {
	TenantID    string
	WorkspaceID string
}

// version is the first byte of a sealed value, which is
//
//	version      1 byte
//	key id       8 bytes
//	nonce, ciphertext and tag, as AES-256-GCM with a random nonce makes them
//
// and what it is bound to is authenticated with it and not part of it.
const version = 1

// The purposes of values: given by a tenant, or added by the mesh.
const (
	ofTenant = "env"
	ofMesh   = "secret_env"
)

// place is the context that a sealed value is bound to.
type place struct {
	Owner

	workload, purpose, name string
}

// bytes encodes the place: every part after its length, so that no two places are the same bytes.
func (p place) bytes(head []byte) []byte {
	out := append([]byte("gpuaas.mesh/workload-secret\x00"), head...)
	for _, part := range []string{p.TenantID, p.WorkspaceID, p.workload, p.purpose, p.name} {
		out = binary.BigEndian.AppendUint32(out, uint32(len(part))) // ids and names, bounded by the request
		out = append(out, part...)
	}
	return out
}

func (p place) String() string { return fmt.Sprintf("variable %q of workload %q", p.name, p.workload) }

var errNoKeys = errors.New("seal environment value: no keys are configured")

func (k *Keys) seal(value string, at place) ([]byte, error) {
	if k == nil {
		return nil, errNoKeys
	}
	id, err := hex.DecodeString(k.first.id)
	if err != nil {
		return nil, fmt.Errorf("seal environment value: %w", err)
	}
	head := append([]byte{version}, id...)
	return k.first.aead.Seal(head, nil, []byte(value), at.bytes(head)), nil
}

func (k *Keys) open(sealed []byte, at place) (string, error) {
	if len(sealed) < 1+idSize || sealed[0] != version {
		return "", invalid(at, errors.New("it is not a sealed value of this version"))
	}
	head := sealed[:1+idSize]
	id := hex.EncodeToString(head[1:])
	one, ok := k.find(id)
	if !ok {
		return "", unknownKey(at.String()+" was sealed", id)
	}
	value, err := one.aead.Open(nil, nil, sealed[1+idSize:], at.bytes(head))
	if err != nil {
		return "", invalid(at, err)
	}
	return string(value), nil
}

func unknownKey(what, id string) error {
	return fault.New(commonv1.Reason_REASON_WORKLOAD_SECRET_KEY_UNKNOWN,
		fmt.Sprintf("%s under key %s, which lifecycle does not have", what, id),
		fault.Unmet("lifecycle's workload_secrets_keys_file has no key "+id))
}

func invalid(at place, cause error) error {
	return fault.New(commonv1.Reason_REASON_WORKLOAD_SECRET_INVALID,
		at.String()+" cannot be opened: it was altered, or sealed for another workspace or name",
		fault.Cause(cause))
}
