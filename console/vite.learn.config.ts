import { readFileSync } from "node:fs";
import { deflateRawSync } from "node:zlib";
import { defineConfig, type Plugin } from "vite";

/** Puts script, style and data into the page: it has to work from a folder, without a server. */
function inOneFile(): Plugin {
  return {
    name: "in-one-file",
    enforce: "post",
    generateBundle(_, bundle) {
      const page = bundle["learn.html"];
      if (page?.type !== "asset") throw new Error("there is no learn.html");
      let html = String(page.source);
      for (const [name, file] of Object.entries(bundle)) {
        if (name === "learn.html") continue;
        const tag = file.type === "chunk" ? /<script type="module"[^>]*><\/script>/ : /<link rel="stylesheet"[^>]*>/;
        const text = file.type === "chunk" ? file.code.replaceAll("</script", "<\\/script") : String(file.source);
        const made = file.type === "chunk" ? "" : `<style>${text}</style>`;
        html = html.replace(tag, () => made);
        if (file.type === "chunk")
          html = html.replace("</body>", () => `  <script type="module">${text}</script>\n  </body>`);
        delete bundle[name];
      }
      const data = deflateRawSync(readFileSync("src/learn/data.json"), { level: 9 }).toString("base64");
      const place = '<script type="module">';
      html = html.replace(place, () => `<script id="data" type="text/plain">${data}</script>\n    ${place}`);
      page.source = html;
    },
  };
}

export default defineConfig({
  base: "./",
  plugins: [inOneFile()],
  build: {
    outDir: "../src/prfaas/gateway/console/assets",
    emptyOutDir: false,
    modulePreload: false,
    cssCodeSplit: false,
    rollupOptions: { input: "learn.html" },
  },
});
