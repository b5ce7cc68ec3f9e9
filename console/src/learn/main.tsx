// The interactive explanation: one page, in a folder, in the docs and in the console.

import { render } from "preact";
import { Page } from "./page";
import "./learn.css";

try {
  const chosen = localStorage.getItem("prfaas-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch {
  // A page from a folder may have no storage.
}
render(<Page />, document.getElementById("root")!);
