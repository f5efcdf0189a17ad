package host

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/gpuaas/mesh/drill/kit/await"
)

// ErrLate is returned by FirstEnvironment if the agent was faster.
var ErrLate = errors.New("the instance had enrolled before its environment was caught")

// FirstEnvironment returns the environment that an instance boots with, read before its agent enrols and writes it
// anew.
func FirstEnvironment(ctx context.Context, file string) ([]byte, error) {
	var env []byte
	err := await.Until(ctx, "the instance's environment", await.Limit, func(ctx context.Context) error {
		var err error
		for range 20 {
			if env, err = os.ReadFile(file); err == nil { // of our own mesh
				break
			}
			if err := await.Sleep(ctx, 2*time.Millisecond); err != nil {
				return err
			}
		}
		return err
	})
	if err == nil && strings.Contains(string(env), "GPUAAS_TASK_SIGNING_PUBKEYS") {
		err = ErrLate
	}
	return env, err
}

// Reimage restores an instance to its state before its first boot. The agent is stopped first, so that it writes
// nothing in between, and killed last, since it is powered on again as soon as it is gone.
func Reimage(pid int, instance string, env []byte) error {
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return err
	}
	err := Wipe(instance)
	file := filepath.Join(instance, "etc", "node-agent.env")
	return errors.Join(err, os.WriteFile(file, env, 0o600), syscall.Kill(pid, syscall.SIGKILL))
}

// Wipe removes the keys, certificates and state of an agent that does not run, as a reimage of its host does.
func Wipe(dir string) error {
	keys, err := filepath.Glob(filepath.Join(dir, "etc", "*.pem"))
	state, stateErr := filepath.Glob(filepath.Join(dir, "state", "*"))
	err = errors.Join(err, stateErr)
	for _, path := range append(keys, state...) {
		err = errors.Join(err, os.RemoveAll(path))
	}
	return err
}

// IdentityDigest returns a digest of the files that make an instance's identity: its keys and certificates, and its
// ids.
func IdentityDigest(instance string) string {
	sum := sha256.New()
	keys, _ := filepath.Glob(filepath.Join(instance, "etc", "*.pem")) // the pattern is good
	for _, f := range append(keys, filepath.Join(instance, "state", "node.json")) {
		if data, err := os.ReadFile(f); err == nil { // of our own mesh
			fmt.Fprintf(sum, "%s %d\n", filepath.Base(f), len(data))
			_, _ = sum.Write(data)
		}
	}
	return hex.EncodeToString(sum.Sum(nil))
}
