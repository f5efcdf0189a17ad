package bundle

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pki"
)

// The most that an archive may have.
const (
	MaxSize     = 512 << 10 // of the archive as it is brought
	maxExpanded = 2 << 20   // of the tar in it
	maxFile     = 512 << 10
	maxEnv      = 64 << 10
	maxName     = 256 // of names in the manifest
)

// Invalid returns fault bundle_invalid with what is wrong.
func Invalid(wrong string) error {
	return fault.New(commonv1.Reason_REASON_BUNDLE_INVALID, "the bundle is refused as a whole: "+wrong)
}

// errTooLarge ends the expansion of an archive.
var errTooLarge = errors.New("it expands to more than " + strconv.Itoa(maxExpanded) + " bytes")

// bounded fails once more than left bytes were read, so that what an archive expands to is never read whole.
type bounded struct {
	inner io.Reader
	left  int
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, errTooLarge
	}
	n, err := b.inner.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

// Read reads an archive and checks that it is whole: the five files and nothing else, each as the manifest describes
// it. An archive with anything that Write does not write is refused as a whole.
func Read(data []byte) (*Archive, error) {
	if len(data) > MaxSize {
		return nil, Invalid("it is larger than " + strconv.Itoa(MaxSize) + " bytes")
	}
	files, err := expand(data)
	if err != nil {
		return nil, Invalid(err.Error())
	}
	a := &Archive{Digest: DigestOf(data), manifest: files[fileManifest]}
	if err := a.fill(files); err != nil {
		return nil, Invalid(err.Error())
	}
	return a, nil
}

// expand returns the files of an archive by name.
func expand(data []byte) (map[string][]byte, error) {
	source := bytes.NewReader(data)
	packed, err := gzip.NewReader(source)
	if err != nil {
		return nil, errors.New("it is not a gzip file")
	}
	if h := packed.Header; h.Name != "" || h.Comment != "" || len(h.Extra) > 0 {
		return nil, errors.New("its gzip header has what no bundle has")
	}
	packed.Multistream(false)
	stream := &bounded{inner: packed, left: maxExpanded}
	archive := tar.NewReader(stream)
	out := map[string][]byte{}
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, damaged(err)
		}
		if err := checkEntry(header, out); err != nil {
			return nil, err
		}
		content, err := io.ReadAll(archive)
		if err != nil {
			return nil, damaged(err)
		}
		out[header.Name] = content
	}
	var one [1]byte
	switch n, err := io.ReadFull(stream, one[:]); {
	case n > 0:
		return nil, errors.New("something follows the end of its tar")
	case !errors.Is(err, io.EOF):
		return nil, damaged(err)
	}
	if source.Len() > 0 {
		return nil, errors.New("something follows the end of its gzip stream")
	}
	for _, name := range slices.Concat([]string{fileManifest, fileSignature}, contents) {
		if _, ok := out[name]; !ok {
			return nil, fmt.Errorf("%s is not in it", name)
		}
	}
	return out, nil
}

func damaged(err error) error {
	if errors.Is(err, errTooLarge) {
		return errTooLarge
	}
	return errors.New("it is damaged: " + err.Error())
}

// checkEntry refuses an entry that Write does not write. Names are compared with those known, so none with a directory,
// a link or `..` in it is accepted.
func checkEntry(h *tar.Header, before map[string][]byte) error {
	known := slices.Contains(contents, h.Name) || h.Name == fileManifest || h.Name == fileSignature
	_, twice := before[h.Name]
	most := int64(maxFile)
	if h.Name == FileEnv {
		most = maxEnv
	}
	switch {
	case !known:
		return fmt.Errorf("it has an entry %q, which no bundle has", clip(h.Name))
	case h.Typeflag != tar.TypeReg, h.Linkname != "", len(h.PAXRecords) > 0, h.Devmajor != 0, h.Devminor != 0:
		return fmt.Errorf("%s is not a plain file in it", h.Name)
	case twice:
		return fmt.Errorf("%s is in it twice", h.Name)
	case h.Size < 0 || h.Size > most:
		return fmt.Errorf("%s is larger than %d bytes", h.Name, most)
	}
	return nil
}

// fill reads the manifest and the signature, and checks the other files against the manifest.
func (a *Archive) fill(files map[string][]byte) error {
	if err := json.Unmarshal(a.manifest, &a.Manifest); err != nil {
		return errors.New("its manifest cannot be read")
	}
	if err := json.Unmarshal(files[fileSignature], &a.signed); err != nil || len(a.signed.Signature) == 0 ||
		len(a.signed.Certificates) == 0 || len(a.signed.Certificates) > pki.MaxChain {
		return errors.New("its signature cannot be read")
	}
	m := &a.Manifest
	if m.Format != format {
		return fmt.Errorf("it is of format %d, and this build reads format %d", m.Format, format)
	}
	for _, v := range []string{
		m.NodeName, m.TrustDomain, m.TokenID, m.Profile.Name, m.Profile.Fingerprint, m.Package.AgentVersion, m.Package.Unit,
		m.Package.InstallRoot, m.Package.Source,
	} {
		if len(v) > maxName {
			return errors.New("a text of its manifest is too long")
		}
	}
	if !ids.Valid(m.NodeID) || m.NodeInstanceID != "" && !ids.Valid(m.NodeInstanceID) {
		return errors.New("its manifest names no node")
	}
	if len(m.Files) != len(contents) {
		return errors.New("its manifest names other files than a bundle has")
	}
	for i, name := range contents {
		sum := sha256.Sum256(files[name])
		switch f := m.Files[i]; {
		case f.Name != name:
			return errors.New("its manifest names other files than a bundle has")
		case f.Size != len(files[name]), f.SHA256 != hex.EncodeToString(sum[:]):
			return fmt.Errorf("%s was altered", name)
		}
	}
	a.Files = Files{Env: files[FileEnv], CA: files[FileCA], RecoveryCA: files[FileRecoveryCA]}
	for name, content := range map[string][]byte{FileCA: a.Files.CA, FileRecoveryCA: a.Files.RecoveryCA} {
		if _, err := pki.DecodeCertificates(content); err != nil {
			return fmt.Errorf("%s has no certificates that can be read", name)
		}
	}
	return nil
}

func clip(s string) string {
	const most = 64
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}
