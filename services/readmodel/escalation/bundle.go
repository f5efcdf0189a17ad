package escalation

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/obs"
)

// Names of the files that every bundle has.
const (
	FileManifest = "manifest.json"
	FileMissing  = "missing.json"
)

// Format is the version of the bundle's format. It is raised when the meaning of a file changes.
const Format = 1

// File is one line of the manifest.
type File struct {
	Name     string `json:"name"`
	Size     int64  `json:"size"`
	SHA256   string `json:"sha256"`
	Position int64  `json:"position,omitempty"` // of the projection that it was read from
}

// Gap is one thing that should be in the bundle and is missing.
type Gap struct {
	What string `json:"what"`
	Why  string `json:"why"`
	Next string `json:"next,omitempty"` // how to get it in another way
}

// Manifest is the content of manifest.json: it describes the bundle and lists its other files.
type Manifest struct {
	Format        int       `json:"format"`
	WorkspaceID   string    `json:"workspace_id"`
	Workspace     string    `json:"workspace"` // tenant/name
	CollectedAt   time.Time `json:"collected_at"`
	CollectedBy   string    `json:"collected_by"`
	CorrelationID string    `json:"correlation_id"`
	Files         []File    `json:"files"`
	Missing       int       `json:"missing"`
}

// bundle is a zip that is being written.
type bundle struct {
	zip      *zip.Writer
	manifest Manifest
	missing  []Gap
}

func newBundle(w io.Writer, m Manifest) *bundle {
	return &bundle{zip: zip.NewWriter(w), manifest: m, missing: []Gap{}}
}

// lacks adds a gap. Its texts are redacted, because they may come from an owner or from an agent.
func (b *bundle) lacks(g Gap) {
	b.missing = append(b.missing, Gap{What: obs.Redact(g.What), Why: obs.Redact(g.Why), Next: obs.Redact(g.Next)})
}

// put writes one file to the zip and adds its line to the manifest.
func (b *bundle) put(name string, content any, position int64) error {
	raw, err := encode(content)
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	if err := b.write(name, raw); err != nil {
		return err
	}
	sum := sha256.Sum256(raw)
	b.manifest.Files = append(b.manifest.Files,
		File{Name: name, Size: int64(len(raw)), SHA256: hex.EncodeToString(sum[:]), Position: position})
	return nil
}

func (b *bundle) write(name string, raw []byte) error {
	f, err := b.zip.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Deflate, Modified: b.manifest.CollectedAt})
	if err == nil {
		_, err = f.Write(raw)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// finish writes the list of gaps and the manifest, and closes the zip.
func (b *bundle) finish() error {
	if err := b.put(FileMissing, map[string]any{"items": b.missing}, 0); err != nil {
		return err
	}
	b.manifest.Missing = len(b.missing)
	raw, err := encode(b.manifest)
	if err == nil {
		err = b.write(FileManifest, raw)
	}
	if err == nil {
		err = b.zip.Close()
	}
	if err != nil {
		return fmt.Errorf("end bundle: %w", err)
	}
	return nil
}

// encode returns content as JSON for people, with the secrets removed from every message.
func encode(content any) ([]byte, error) {
	raw, err := json.Marshal(content)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, raw, "", "  "); err != nil {
		return nil, err
	}
	out.WriteByte('\n')
	return out.Bytes(), nil
}

// cleaned is a message that is marshalled without its secrets.
type cleaned struct{ message proto.Message }

// MarshalJSON implements json.Marshaler.
func (c cleaned) MarshalJSON() ([]byte, error) {
	return names.MarshalJSON(audit.Clean(c.message))
}

// items returns a list in the form in which the API returns lists.
func items[M proto.Message](list []M) any {
	out := make([]cleaned, len(list))
	for i, m := range list {
		out[i] = cleaned{m}
	}
	return map[string]any{"items": out}
}
