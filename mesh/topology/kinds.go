// Package topology defines which services a mesh consists of, how each is configured to find the others, and how each
// is built.
//
// It owns nothing at run time: it turns material and addresses into configurations, and a configuration into a service
// that its caller runs. Guarantees: a service built here in one process with the others is the same as the one built
// from its file in a process of its own.
package topology

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/mesh/internal/config"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/mesh/material"
	"github.com/gpuaas/mesh/services/lifecycle"
	"github.com/gpuaas/mesh/services/nodeapi"
	"github.com/gpuaas/mesh/services/readmodel"
	"github.com/gpuaas/mesh/services/recovery"
)

// Running is a service that has been built and listens.
type Running interface {
	// Run serves until ctx ends.
	Run(ctx context.Context) error
	// OpsAddr returns the address of its metrics and health.
	OpsAddr() string
}

// AskReady returns nil if the process whose health is served at ops is ready.
func AskReady(ctx context.Context, client *http.Client, ops string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+ops+"/readyz", nil)
	if err != nil {
		return fmt.Errorf("ask %s: %w", ops, err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("ask %s: %w", ops, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("not ready: %s", resp.Status)
	}
	return nil
}

// OneRequest returns a client that keeps no connection.
func OneRequest() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
}

// Kind is one service that a process can be.
type Kind struct {
	Name string
	// Check returns everything that is wrong with a configuration file.
	Check func(file string) []config.Problem
	// Load reads a configuration file with the environment over it.
	Load func(file string, environ []string) (Loaded, error)
}

// Loaded is a configuration that has been read and found valid.
type Loaded struct {
	Log obs.LogConfig
	// Open builds the service.
	Open func(ctx context.Context, logger *slog.Logger, registry *obs.Registry) (Running, error)
}

// Kinds returns all services.
func Kinds() []Kind {
	return []Kind{
		kind(material.NodeAPI, nodeapi.Default(), func(c nodeapi.Config) obs.LogConfig { return c.Log }, openNodeAPI),
		kind(material.Lifecycle, lifecycle.Default(), func(c lifecycle.Config) obs.LogConfig { return c.Log }, openLifecycle),
		kind(material.Recovery, recovery.Default(), func(c recovery.Config) obs.LogConfig { return c.Log }, openRecovery),
		kind(material.Readmodel, readmodel.Default(), func(c readmodel.Config) obs.LogConfig { return c.Log }, openReadmodel),
	}
}

type opener[C any] func(ctx context.Context, logger *slog.Logger, registry *obs.Registry, cfg C) (Running, error)

// kind binds a service's configuration to its constructor.
func kind[C any](name string, defaults C, log func(C) obs.LogConfig, open opener[C]) Kind {
	return Kind{
		Name:  name,
		Check: func(file string) []config.Problem { return config.Check(defaults, file) },
		Load: func(file string, environ []string) (Loaded, error) {
			cfg, err := config.Load(defaults, config.LoadOptions{
				File: file, EnvPrefix: "GPUAAS_" + strings.ToUpper(name) + "_", Environ: environ,
			})
			if err != nil {
				return Loaded{}, err
			}
			return Loaded{Log: log(cfg), Open: func(ctx context.Context, logger *slog.Logger, registry *obs.Registry) (Running,
				error,
			) {
				return open(ctx, logger, registry, cfg)
			}}, nil
		},
	}
}

func openNodeAPI(ctx context.Context, logger *slog.Logger, registry *obs.Registry, cfg nodeapi.Config) (Running,
	error,
) {
	return nodeapi.New(ctx, nodeapi.Deps{Logger: logger, Registry: registry}, cfg)
}

func openLifecycle(ctx context.Context, logger *slog.Logger, registry *obs.Registry, cfg lifecycle.Config) (Running,
	error,
) {
	return lifecycle.New(ctx, lifecycle.Deps{Logger: logger, Registry: registry}, cfg)
}

func openReadmodel(ctx context.Context, logger *slog.Logger, registry *obs.Registry, cfg readmodel.Config) (Running,
	error,
) {
	return readmodel.New(ctx, readmodel.Deps{Logger: logger, Registry: registry}, cfg)
}

func openRecovery(ctx context.Context, logger *slog.Logger, registry *obs.Registry, cfg recovery.Config) (Running,
	error,
) {
	return recovery.New(ctx, recovery.Deps{Logger: logger, Registry: registry}, cfg)
}

// Lookup returns a kind by its name.
func Lookup(name string) (Kind, bool) {
	kinds := Kinds()
	i := slices.IndexFunc(kinds, func(k Kind) bool { return k.Name == name })
	if i < 0 {
		return Kind{}, false
	}
	return kinds[i], true
}

// ErrUndetected is returned if a file does not name the service that it configures.
var ErrUndetected = errors.New("the file does not say whose configuration it is: add `service:` with the name of " +
	"one, or name it with --service")

// Detect returns the kind of service that a file configures, by its key `service`.
func Detect(file string) (Kind, error) {
	data, err := pki.ReadFile(file)
	if err != nil {
		return Kind{}, err
	}
	var head struct {
		Service string `yaml:"service"`
	}
	if err := yaml.Unmarshal(data, &head); err != nil {
		return Kind{}, fmt.Errorf("read %s: %w", file, err)
	}
	if head.Service == "" {
		return Kind{}, ErrUndetected
	}
	k, ok := Lookup(head.Service)
	if !ok {
		return Kind{}, fmt.Errorf("%s: there is no service %q", file, head.Service)
	}
	return k, nil
}
