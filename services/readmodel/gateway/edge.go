package gateway

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/cors"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1/readmodelv1connect"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/readmodel/watch"
)

// sendLimit is how long one frame of a watch may wait for its watcher.
const sendLimit = 10 * time.Second

type controllerKey struct{}

// preflightLife is how long a browser may keep the answer to a preflight, in seconds; more is cut by most.
const preflightLife = "7200"

// Edge goes around the people's port: requests that a browser sends for another site are refused, unless the site is trusted; only a trusted site gets
// headers by which its pages may read answers, never with credentials of the browser, since the API knows bearer tokens alone; and a watch can bound how
// long it waits for its watcher.
func Edge(trustedOrigins []string) (func(http.Handler) http.Handler, error) {
	protection := http.NewCrossOriginProtection()
	for _, origin := range trustedOrigins {
		if err := protection.AddTrustedOrigin(origin); err != nil {
			return nil, fmt.Errorf("trust origin: %w", err)
		}
	}
	protection.SetDenyHandler(http.HandlerFunc(refuseSite))
	return func(next http.Handler) http.Handler {
		guarded := protection.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h := w.Header()
			h.Set("X-Content-Type-Options", "nosniff")
			h.Set("Cache-Control", "no-store")
			switch r.URL.Path {
			case readmodelv1connect.QueryServiceWatchProcedure, readmodelv1connect.EscalationServiceEscalateProcedure:
				r = r.WithContext(context.WithValue(r.Context(), controllerKey{}, http.NewResponseController(w)))
			}
			next.ServeHTTP(w, r)
		}))
		return sharing(trustedOrigins, guarded)
	}, nil
}

// sharing adds what a trusted site's browser wants to see, and answers its preflights.
func sharing(trusted []string, next http.Handler) http.Handler {
	allowed := strings.Join(append(cors.AllowedHeaders(), "Authorization", rpc.HeaderCorrelationID), ", ")
	exposed := strings.Join(append(cors.ExposedHeaders(), rpc.HeaderCorrelationID), ", ")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Add("Vary", "Origin")
		origin := r.Header.Get("Origin")
		if !slices.Contains(trusted, origin) {
			next.ServeHTTP(w, r)
			return
		}
		h.Set("Access-Control-Allow-Origin", origin)
		if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" {
			h.Add("Vary", "Access-Control-Request-Method")
			h.Add("Vary", "Access-Control-Request-Headers")
			h.Set("Access-Control-Allow-Methods", http.MethodPost)
			h.Set("Access-Control-Allow-Headers", allowed)
			h.Set("Access-Control-Max-Age", preflightLife)
			w.WriteHeader(http.StatusNoContent)
			return
		}
		h.Set("Access-Control-Expose-Headers", exposed)
		next.ServeHTTP(w, r)
	})
}

// refuseSite writes the typed refusal of a request that a browser sends for a site that is not trusted.
func refuseSite(w http.ResponseWriter, r *http.Request) {
	refusal := fault.New(commonv1.Reason_REASON_PERMISSION_DENIED, "a browser sent this for another site",
		fault.Unmet("the site "+r.Header.Get("Origin")+" is not one of trusted_origins"),
		fault.Remedy("to let pages of that site call the API, add its origin, scheme://host[:port], to trusted_origins in the configuration of readmodel "+
			"and restart it"))
	// What is none of the protocols, such as a form, is answered as a request of Connect would be.
	_ = connect.NewErrorWriter().Write(w, r, fault.ToConnect(refusal, ids.New())) // a browser that has gone is not told
}

// bounded is send with a time limit on each frame. Without it a watcher that does not read would hold its stream, and us, for as long as its
// connection answers pings.
func bounded(ctx context.Context, send watch.Send) watch.Send {
	controller, ok := ctx.Value(controllerKey{}).(*http.ResponseController)
	if !ok {
		return send
	}
	return func(frame *readmodelv1.WatchResponse) error {
		// A transport without deadlines keeps the stream as it is.
		_ = controller.SetWriteDeadline(time.Now().Add(sendLimit))
		err := send(frame)
		_ = controller.SetWriteDeadline(time.Time{})
		return err
	}
}
