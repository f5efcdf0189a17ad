// Package firsthour repeats docs/first-hour.md: each command of the page is run on a terminal of 80 columns against a
// mesh that `gpuaas dev` brings up, and its output is compared with that of the page.
//
// `make first-hour` writes the page's output anew. The package has tests only.
package firsthour
