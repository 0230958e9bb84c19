# A formula for a tap: brew install --formula ./contrib/homebrew/quire-serve.rb
# `url` and `sha256` are those of the release's source archive; the dependencies of Python come from
# the package index when the formula is installed.
class QuireServe < Formula
  include Language::Python::Virtualenv

  desc "Inference server for language and vision-language models on MLX"
  homepage "https://pypi.org/project/quire-serve/"
  url "https://files.pythonhosted.org/packages/source/q/quire-serve/quire_serve-0.2.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on :macos
  depends_on "python@3.13"

  def install
    virtualenv_create(libexec, "python3.13")
    system "python3.13", "-m", "pip", "--python=#{libexec}/bin/python", "install", "#{buildpath}[media]"
    bin.install_symlink libexec/"bin/quire"
    generate_completions_from_executable(bin/"quire", "completion")
  end

  service do
    run [opt_bin/"quire", "serve"]
    keep_alive true
    log_path var/"log/quire.log"
    error_log_path var/"log/quire.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/quire --version")
    system bin/"quire", "models"
  end
end
