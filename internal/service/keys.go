package service

import (
	"context"
	"errors"
	"strings"
	"sync"

	"github.com/gpuaas/mesh/internal/app"
	"github.com/gpuaas/mesh/internal/keyset"
)

// PartKeys is the part of a service's health that reports whether its files hold the keys of the mesh.
const PartKeys = "keys"

// OpenKeys opens this replica's view of the signing keys, and follows them while the service runs. A replica whose
// files differ from the set of the mesh is refused. onProblems is called with the problems of each round; it may be
// nil.
func (b *Base) OpenKeys(ctx context.Context, onProblems func(context.Context, []string),
	parts ...keyset.Part,
) (*keyset.Set, error) {
	var mu sync.Mutex
	var present []string
	set, err := keyset.Open(ctx, keyset.Deps{
		Logger: b.Logger, Pool: b.DB, Wake: b.Wake, Changed: b.Settings, Service: b.Name, ReplicaID: b.ReplicaID,
		Certificates: &keyset.Certificates{Store: b.Store, Roots: b.Services, Changed: b.OnIssuers},
		Consumes:     func() []string { return b.consumers },
		OnProblems: func(ctx context.Context, problems []string) {
			mu.Lock()
			present = problems
			mu.Unlock()
			if onProblems != nil {
				onProblems(ctx, problems)
			}
		},
	}, parts...)
	if err != nil {
		return nil, err
	}
	// A problem is reported, and the service stays ready: it serves with the keys that were loaded before.
	b.Health.Watch(PartKeys, func(context.Context) error {
		mu.Lock()
		defer mu.Unlock()
		if len(present) > 0 {
			return errors.New(strings.Join(present, "; "))
		}
		return nil
	})
	b.Add(app.Task{Name: "keys", Run: set.Run})
	return set, nil
}
