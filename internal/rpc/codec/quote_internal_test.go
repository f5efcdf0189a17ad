package codec

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

// TestRefusalsDoNotQuoteValues: the receiver logs the defect of a body, and the defective part may hold a secret.
func TestRefusalsDoNotQuoteValues(t *testing.T) {
	const secret = "91be7731"
	decode := &codec{name: "json", json: true, unmarshal: protojson.UnmarshalOptions{}.Unmarshal}
	for name, env := range map[string]string{
		"a number": `{"K": ` + secret + `}`, "no quotes": `{"K": x` + secret + `}`,
		"a bad escape": `{"K": "\q` + secret + `"}`, "a text for the map": `"K=` + secret + `"`,
		"a list for the map": `["` + secret + `"]`, "a number as the map": secret,
		"a control character": "{\"K\": \"\x01" + secret + "\"}", "no end": `{"K": "` + secret,
	} {
		body := `{"tenant": "acme", "spec": {"workloads": [{"name": "main", "env": ` + env + `}]}}`
		got := &readmodelv1.CreateWorkspaceRequest{}
		if err := decode.Unmarshal([]byte(body), got); err != nil {
			t.Fatal(err)
		}
		err := Problem(got)
		if err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
