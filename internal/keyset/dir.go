package keyset

import (
	"cmp"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/gpuaas/mesh/internal/pki"
)

// Headers of a key's file. Earlier builds ignore them.
const (
	headerKind        = "Kind"
	headerEndorsedBy  = "Endorsed-By"
	headerEndorsement = "Endorsement"
	blockKey          = "PRIVATE KEY"
)

// Files describes where the private keys of a kind are: in Dir, the first one in the file First, and those after it in
// files named by Prefix, a number and a name.
type Files struct {
	Dir, First, Prefix string
	// Any makes read take every other file that ends in .pem as well: it is for a directory that has nothing else.
	Any bool
}

// FilesOf returns the files of a kind whose first key is at path: those after it are in the same directory, under its
// name with a number.
func FilesOf(path string) Files {
	first := filepath.Base(path)
	return Files{Dir: filepath.Dir(path), First: first, Prefix: strings.TrimSuffix(first, filepath.Ext(first)) + "-"}
}

// DirFiles returns the files of a kind that has a directory of its own.
func DirFiles(dir, prefix string) Files {
	return Files{Dir: dir, First: prefix + "000001.pem", Prefix: prefix, Any: true}
}

func (f Files) match(name string) bool {
	if name == f.First {
		return true
	}
	return strings.HasSuffix(name, ".pem") && !strings.HasPrefix(name, ".") && (f.Any || strings.HasPrefix(name, f.Prefix))
}

// privateKey is one file.
type privateKey struct {
	file        string
	id          string
	private     ed25519.PrivateKey
	endorsedBy  string
	endorsement []byte
}

func (k privateKey) public() ed25519.PublicKey {
	public, _ := k.private.Public().(ed25519.PublicKey)
	return public
}

// stamp describes the files of the directory by their names, sizes, modes and times: it differs when one was replaced.
func (f Files) stamp() string {
	entries, err := os.ReadDir(f.Dir)
	if err != nil {
		return err.Error()
	}
	var out strings.Builder
	for _, entry := range entries {
		if f.match(entry.Name()) {
			out.WriteString(stamp(filepath.Join(f.Dir, entry.Name())))
		}
	}
	return out.String()
}

func stamp(path string) string {
	info, err := os.Stat(path)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%s %d %s %d\n", path, info.Size(), info.Mode(), info.ModTime().UnixNano())
}

// read returns the keys of the directory in the order in which they were made, as far as their names give it: the first
// one, then those with a number. If Any is set, the order is that of the names. For a file that is bad it returns a
// problem, by the file's name, and no key.
func (f Files) read(kind Kind) ([]privateKey, map[string]string, error) {
	entries, err := os.ReadDir(f.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, unreadable(kind, f.Dir, err)
	}
	if !f.Any {
		// The name without a number sorts behind those with one, although its key is the oldest.
		slices.SortStableFunc(entries, func(x, y os.DirEntry) int {
			return cmp.Compare(rank(x.Name() == f.First), rank(y.Name() == f.First))
		})
	}
	var keys []privateKey
	problems := map[string]string{}
	for _, entry := range entries {
		if !f.match(entry.Name()) {
			continue
		}
		key, err := readKey(filepath.Join(f.Dir, entry.Name()), kind)
		if err != nil {
			problems[entry.Name()] = err.Error()
			continue
		}
		keys = append(keys, key)
	}
	return keys, problems, nil
}

// rank returns the rank that sorts the first one before the rest.
func rank(first bool) int {
	if first {
		return 0
	}
	return 1
}

// closedToOthers reports whether only this process and root may read a file. A file of this process's user with mode
// 0600 qualifies. So does a file of root with a group of this process that may only read it, as Kubernetes mounts a
// secret for the group of a pod (fsGroup): its members are the processes of the pod.
func closedToOthers(info os.FileInfo, euid int, groups []int) bool {
	perm := info.Mode().Perm()
	if perm&0o077 == 0 {
		return true
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && perm&0o037 == 0 && stat.Uid == 0 && euid != 0 && slices.Contains(groups, int(stat.Gid))
}

// groupsOf returns the groups of this process.
func groupsOf() []int {
	groups, err := os.Getgroups()
	if err != nil {
		groups = nil // only the effective group counts
	}
	return append(groups, os.Getegid())
}

func readKey(path string, kind Kind) (privateKey, error) {
	name := filepath.Base(path)
	info, err := os.Stat(path)
	if err != nil {
		return privateKey{}, errors.New("it cannot be read")
	}
	if !closedToOthers(info, os.Geteuid(), groupsOf()) {
		return privateKey{}, fmt.Errorf("its mode is %04o: others than its owner may use it (`chmod 600`; a secret of "+
			"Kubernetes: 0440 and the pod's group)",
			info.Mode().Perm())
	}
	data, err := pki.ReadFile(path)
	if err != nil {
		return privateKey{}, errors.New("it cannot be read")
	}
	private, err := pki.LoadSigningKey(path)
	if err != nil {
		return privateKey{}, errors.New("it is no Ed25519 private key in PEM")
	}
	key := privateKey{file: name, private: private}
	key.id = pki.KeyID(key.public())
	block, _ := pem.Decode(data)
	if block == nil {
		return privateKey{}, errors.New("it is no Ed25519 private key in PEM")
	}
	if of := block.Headers[headerKind]; of != "" && of != string(kind) {
		return privateKey{}, fmt.Errorf("it is a key of %s, and no key serves two kinds", of)
	}
	key.endorsedBy = block.Headers[headerEndorsedBy]
	if key.endorsement, err = base64.StdEncoding.DecodeString(block.Headers[headerEndorsement]); err != nil {
		return privateKey{}, errors.New("its endorsement cannot be read")
	}
	return key, nil
}

// newKey generates the key that is the number-th of its kind, endorsed by the key that signs, or without an endorsement
// if by is nil.
func (f Files) newKey(number int, kind Kind, by *privateKey) (privateKey, error) {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return privateKey{}, fmt.Errorf("make key: %w", err)
	}
	key := privateKey{private: private, file: f.First}
	key.id = pki.KeyID(key.public())
	if by != nil {
		key.endorsedBy, key.endorsement = by.id, Endorse(by.private, kind, key.public())
		key.file = fmt.Sprintf("%s%06d-%s.pem", f.Prefix, number, key.id[:8])
	}
	return key, nil
}

// write writes a key's file durably.
func (f Files) write(key privateKey, kind Kind) error {
	der, err := x509.MarshalPKCS8PrivateKey(key.private)
	if err != nil {
		return fmt.Errorf("encode key: %w", err)
	}
	block := &pem.Block{Type: blockKey, Bytes: der}
	if key.endorsedBy != "" {
		block.Headers = map[string]string{
			headerKind: string(kind), headerEndorsedBy: key.endorsedBy,
			headerEndorsement: base64.StdEncoding.EncodeToString(key.endorsement),
		}
	}
	if err := pki.WriteFile(filepath.Join(f.Dir, key.file), pem.EncodeToMemory(block)); err != nil {
		return fmt.Errorf("write key: %w", err)
	}
	return nil
}
