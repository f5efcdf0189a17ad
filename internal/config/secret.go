package config

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/gpuaas/mesh/internal/obs"
)

// Secret is text that prints as [redacted], so that printing it by accident does not disclose it.
type Secret = obs.Secret

// maxSecretSize bounds in bytes what is read of a file: a secret is a password, a token or a key, all of them short.
const maxSecretSize = 64 << 10

// SecretFile is the path of a file that holds a secret. The file is read when the secret is needed, so that a rotated
// secret takes effect.
type SecretFile string

// Read returns the file's text without the line end. It refuses a file that group or others may read, one that is not a
// regular file, an empty one and one over 64 KiB.
func (f SecretFile) Read() (Secret, error) {
	if f == "" {
		return "", errors.New("read secret: no file is configured")
	}
	file, err := os.Open(string(f))
	if err != nil {
		return "", fmt.Errorf("read secret: %w", err)
	}
	defer func() { _ = file.Close() }() // read only
	info, err := file.Stat()
	if err != nil {
		return "", fmt.Errorf("read secret: %w", err)
	}
	switch {
	case !info.Mode().IsRegular():
		return "", fmt.Errorf("read secret: %s is not a regular file", f)
	case info.Mode().Perm()&0o077 != 0:
		return "", fmt.Errorf("read secret: %s has mode %04o: group and others must not reach it (chmod 0600)", f,
			info.Mode().Perm())
	case info.Size() > maxSecretSize:
		return "", fmt.Errorf("read secret: %s is larger than 64 KiB", f)
	}
	raw, err := io.ReadAll(io.LimitReader(file, maxSecretSize))
	if err != nil {
		return "", fmt.Errorf("read secret: %w", err)
	}
	text := strings.TrimRight(string(raw), "\r\n")
	if text == "" {
		return "", fmt.Errorf("read secret: %s is empty", f)
	}
	return Secret(text), nil
}
